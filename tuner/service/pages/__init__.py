"""The service's pages: templates filled here, and a small script that keeps them
current. Everything is readable without the script, but for the pictures.
"""
