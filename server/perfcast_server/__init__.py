"""perfcast_server"""
