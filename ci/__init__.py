"""Build, test and demonstration tooling: not part of the installed product."""
