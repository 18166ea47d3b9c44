"""`rlft doctor`: does it work here?"""
