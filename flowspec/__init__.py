"""FlowSpec for programs: one language model over several devices in a pipeline, which guesses ahead to keep them busy.

    from flowspec import Pipeline

    with Pipeline.open("smollm2", temperature=0.7) as pipeline:
        for piece in pipeline.stream("What does a baker do?"):
            print(piece, end="", flush=True)

The pipeline runs in a process of its own: no folder of FlowSpec enters `sys.path`, and none of its modules but this
package `sys.modules`. Answers are plain data; errors have the types ValueError, RuntimeError and `PeerLost`.
"""
from flowspec.asynchronous import AsyncPipeline
from flowspec.engine_process import PeerLost
from flowspec.pipeline import Answer, Generation, Guide, Pipeline

__all__ = ["Answer", "AsyncPipeline", "Generation", "Guide", "PeerLost", "Pipeline"]
