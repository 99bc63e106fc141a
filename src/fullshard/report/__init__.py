"""`fullshard report`: one HTML page about a run, from the files it left.

reading        the folder as plain values; trace_file: one rank's trace
timeline       where the time of a step went; intervals: arithmetic of time
replay         what waits would remain at another prefetch depth
analysis       the numbers that findings and charts share
findings       what they mean, in plain language: run_findings, step_findings
"""
