"""Adapters' files from elsewhere: an import folder, HTTPS, an S3 store, a hub.

`bring` is the one entrance; nothing else connects to anything. Not what the files hold (`adapters.peft`) nor where they
are kept (`adapters.store`).
"""
