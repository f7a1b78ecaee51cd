"""``panpipe explore``: a local web page on plans and schedules."""

from pathlib import Path

from ..answers.bundled_models import BUNDLED, check_model_name
from ..answers.options import argument, option
from ..core.errors import RequestError


def explore(
    files: list[Path] | None = argument(
        "Results to open: plans, traces, schedule files; or an operator-graph file to plan for.", metavar="[FILE]..."
    ),
    model: str | None = option(
        "Start with this model; a function named here is called without another question.",
        metavar="MODULE:FACTORY|NAME",
    ),
    cluster: str | None = option("Start with this cluster: a name or a file."),
    port: int | None = option("Port of the server, by default 8416; 0 for any free one.", min=0, max=65535),
    browser: bool = option("Open a browser.", True, "--browser/--no-browser"),
) -> None:
    """Explore schedules, plans and results in a browser, with the same code as the other commands.

    The server listens on this machine only, and its address has a token. It ends with Ctrl-C.
    """
    if model is not None:
        check_model_name(model)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise RequestError(f"panpipe explore needs {error.name}: pip install 'panpipe[explore]'") from None
    from ..core.cluster.catalog.find import find_cluster
    from ..explore.app import Explorer, serve
    from ..explore.question import FileQuestion, PlanQuestion, Question, UniformQuestion
    from ..explore.results import open_results

    results = open_results(files or [])
    start: Question = UniformQuestion()
    if cluster is not None:
        find_cluster(cluster)
    if results.shown:
        start = FileQuestion()
    elif model is not None or cluster is not None or results.graph is not None:
        start = PlanQuestion(
            cluster=cluster or PlanQuestion().cluster,
            graph=None if results.graph is None else str(results.graph),
            model=model if model is not None or results.graph is not None else next(iter(BUNDLED)),
        )
    factory = model if model is not None and ":" in model else None
    serve(Explorer(start, results, factory), port=port, browser=browser)
