"""Steps of a GPU's check, a module each with `run(rows, *arguments, is_check=...)`, which returns whether it holds.

Each runs in a process of its own (`bench.gpu.step`). May import penstock, torch, and what wheels.txt lists; whatever
else a step needs is in its line of `bench.gpu.plan`.
"""
