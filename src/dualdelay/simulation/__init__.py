"""Virtual time: speeds, availability, links, clocks, and workers simulated in this process."""
