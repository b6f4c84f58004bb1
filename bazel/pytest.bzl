"""py_test targets that run pytest."""

def pytest_files(name, srcs, **kwargs):
    """One py_test for each file, named after it, and a test_suite `name` of them all.

    Args:
      name: name of the suite.
      srcs: test files.
      **kwargs: passed to every py_test.
    """
    tests = []
    for src in srcs:
        test = src[:-len(".py")]
        tests.append(test)
        native.py_test(
            name = test,
            srcs = ["//bazel:pytest_main.py", src],
            main = "//bazel:pytest_main.py",
            args = ["$(rootpath %s)" % src],
            **kwargs
        )
    native.test_suite(name = name, tests = tests)
