"""Whole runs in virtual time: the agents and the coordinator as they are, in one process, with hosts, links, kernels,
workers and people that are simulated. A seed decides everything. ``python -m tests.simulation --help``."""
