"""perfcast_cli"""
