"""Safe points, agreement, progress and saves inside the program."""
