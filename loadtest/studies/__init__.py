"""The commands that make runs: one run with its report, and ladder, compare and overhead, which make several.

Not the sending (`run`) nor the pages (`report`). May import everything but main.
"""
