"""Compares runs: which one is faster, and is it as good?"""
