"""The trace viewer: what moved, and why somebody waited, drawn from the trace of a run.

The figures are those of `tiermem.trace.summary`. What is drawn comes in *tiles*: a tile holds one stretch of time,
in so many bins and, where they are few enough, span by span. So what a page asks for at once doesn't grow with
the trace. The page is served to a browser on this machine (`tiermem.viewer.server`), or written to one file that
needs nothing else (`tiermem.viewer.page`).
"""
