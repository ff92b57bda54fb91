"""The paper's experiments, whole: what is run, the runs themselves, and what is written about them."""
