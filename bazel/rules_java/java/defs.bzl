"""Bazel's own Java rules under the names that its built-in tools load; no Java is built here."""

java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
