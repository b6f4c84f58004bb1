"""The Python toolchain is the interpreter of .venv, with every package it has installed."""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_runtime(
    name = "runtime",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _venv_python_impl(ctx):
    interpreter = ctx.path(Label("//:WORKSPACE")).dirname.get_child(".venv").get_child("bin").get_child("python")
    if not interpreter.exists:
        fail("There is no .venv/bin/python: run `make venv` first")
    ctx.file("BUILD.bazel", _BUILD.format(interpreter = interpreter))

venv_python = repository_rule(
    implementation = _venv_python_impl,
    local = True,
    doc = "Declares `//:toolchain` around the workspace's .venv/bin/python.",
)
