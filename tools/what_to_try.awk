# The lines of a server as they are, and after "ready: " what to try in another terminal.
{ print; fflush() }
/^listening on / { target = $3; sub(",", "", target); page = $6 }
/^ready: / {
	bin = ENVIRON["BIN"]
	print "\nIn another terminal:"
	print "  " bin "/vitwire encode PHOTO.jpg --target " target
	print "  " bin "/vitwire bench --seconds 5 --target " target
	print "  " bin "/vitwire info --target " target
	if (page) print "  status page: http://" page "/"
	fflush()
}
