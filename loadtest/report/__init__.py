"""What is shown of a run, ladder or comparison at the end: a table for the terminal, plots, one self-contained page.

Not the computing of the figures (`results`) nor the panel while a run goes on (`run`). Pages are filled from
templates/; every text is escaped there. May import results, scenario and errors, and matplotlib, which may be absent:
other rooms import pages and plots where they need them.
"""
