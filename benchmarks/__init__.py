"""Measurements that anybody can repeat: ``python -m benchmarks.NAME``; none is a timed test."""
