"""A folder for PYTHONPATH: replicas that are started with it there fail on purpose.
Not a package to import from: Python finds the one module in it by itself."""
