"""The page of runs: live in a browser, or frozen as report.html; and a PNG of the curves. All read the run directory alone."""
