"""What is shown at the end: a table, plots, one self-contained page."""
