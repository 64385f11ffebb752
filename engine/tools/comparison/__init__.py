"""Several runs side by side: which is faster, and is it as good?"""
