"""Commands that look at ranks and runs: one file each."""
