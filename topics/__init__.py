"""topics: a persistent event engine for one machine, as a system of processes and rings."""

__version__ = "0.1.0"
