"""``torch.compile(model, backend="panpipe")``: a graph of Dynamo's as a pipeline over threads of this process.

Read `backend`, then `cutting` and `running`.
"""
