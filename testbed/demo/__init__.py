"""The demo: kpro6's story on the simulated host, checked step by step."""
