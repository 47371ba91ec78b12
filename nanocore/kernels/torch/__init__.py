"""The reference backend: plain torch on any device, written to be checked by eye.

Every other backend is compared with it, and takes its functions for what it leaves to torch. Each
file ends with the part of the interface that it implements; `backend` puts the parts together.
"""
