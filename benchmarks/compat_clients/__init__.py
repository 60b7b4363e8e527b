"""The clients of `benchmarks.compat`, each run by its own interpreter, and the proxy between them and the gateway."""
