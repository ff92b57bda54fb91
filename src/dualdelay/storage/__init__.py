"""Files that are whole or not there: checkpoints, a run's folder, locks."""
