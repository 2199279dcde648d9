"""Features that few users need; the core finds them by entry points alone, and imports none.

Any of them may be removed once nobody uses it.
"""
