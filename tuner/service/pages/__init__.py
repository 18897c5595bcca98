"""What a browser sees of the service: templates filled here, and a little script that keeps them
current. Everything is readable without the script, but for the pictures.
"""
