"""`fullshard export`: a run or a checkpoint as a folder that transformers loads.

command      arguments, exit codes
origin       what is exported: which checkpoint, which model, which folder
folder_form  a model that transformers knows from a folder of its own, for checkpoints that are not of a run
"""
