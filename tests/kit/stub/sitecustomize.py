"""Python imports this first in every process of a command whose PYTHONPATH has this folder.

`SPU_LLM_STUB` set: workers run `stub_program` in place of SPU and the models. `SPU_LLM_STALL_S`
shortens the deadlines of supervisors, `SPU_LLM_SILENCE_S` the silence that ends a session, and
`SPU_LLM_LOOK_S` the pauses of `prepare --watch`.
`SPU_LLM_STUDY` is one more line of the register of studies, as NAME=PLACE.
"""

import os
import sys

if any("spu_llm.service.worker" in argument for argument in sys.orig_argv):
    if "SPU_LLM_STUB" in os.environ:
        import stub_program  # type: ignore[import-not-found]

        stub_program.install()
elif "SPU_LLM_STALL_S" in os.environ:
    from spu_llm.service import watch

    deadline_s = float(os.environ["SPU_LLM_STALL_S"])
    watch.COMPUTED_S *= deadline_s / watch.STALL_S
    watch.STALL_S = deadline_s

if "SPU_LLM_SILENCE_S" in os.environ:
    from spu_llm.net.control import Control

    Control.__init__.__defaults__ = (float(os.environ["SPU_LLM_SILENCE_S"]),)

if "SPU_LLM_LOOK_S" in os.environ and "prepare" in sys.orig_argv:
    from spu_llm.app import keeping

    keeping.LOOK_S = float(os.environ["SPU_LLM_LOOK_S"])

if "SPU_LLM_STUDY" in os.environ:
    from spu_llm.service import programs

    name, _, place = os.environ["SPU_LLM_STUDY"].partition("=")
    programs.STUDIES[name] = place
