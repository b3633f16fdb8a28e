"""perfcast_deploy"""
