"""Pipeline switch: warm ranks go on with the next task's parameters."""
