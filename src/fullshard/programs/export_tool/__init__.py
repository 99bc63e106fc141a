"""`fullshard export`: a run or a checkpoint as a folder that transformers loads.

command      arguments, exit codes
folder_form  a model that transformers knows from a folder of its own, for checkpoints that are not of a run
"""
