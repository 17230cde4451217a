"""Tool calls as text: how a family of models is told of tools and writes its calls, and calls out of an answer as it
comes. Not the request's fields (`wire.tools`) and not the answer's JSON (`router.completions.formats`). May import
base and wire; nothing of `penstock.text` beside it.
"""
