"""perfcast_client"""
