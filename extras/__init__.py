"""What few users need. It imports the core, which finds it by entry points alone.

Any of it may go when nobody uses it.
"""
