"""``torch.compile(model, backend="panpipe")``: runs a graph of Dynamo as a pipeline over threads of this process.

Read `backend`, then `cutting` and `graph_run`.
"""
