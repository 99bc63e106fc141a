"""`fullshard plan`: whether a model will fit, how fast it will train, and why.

It may import the engine, the APIs, the trainer's configuration and `inspect`; nothing else imports it. It owns virtual
devices, programs of steps and hardware profiles.
"""
