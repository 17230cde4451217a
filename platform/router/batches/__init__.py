"""Files and batches of tenants: what Redis holds of them, the folder of their texts, and the running of a batch's lines
beside other requests. Not their pages (`api`), nor how a line is answered (`completions`), which is passed in.
"""
