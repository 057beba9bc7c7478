"""The words of this project as frozen dataclasses and units. Standard library only.

Nothing here reads a clock, a file, a socket or the environment: the daemon, the simulator, the
command line and the rank wrapper all import from this package, so it has to stay free of I/O.
"""
