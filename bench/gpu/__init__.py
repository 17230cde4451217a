"""Everything there is to check and measure on an NVIDIA GPU, in one command that needs little: Python, torch, Triton,
pytest and a folder of small wheels. `python -m bench.gpu --help`.

Not the steps themselves (`steps`): here are the list of them, the runner, the record and the wheels, by the standard
library alone.
"""
