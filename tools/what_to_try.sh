#!/usr/bin/env bash
# Print a server's lines as they come, and after "ready: " what to try in another terminal: SERVER | tools/what_to_try.sh BIN
trap '' INT # Ctrl-C ends the server, whose last lines are still read
while IFS= read -r line; do
	echo "$line"
	case $line in
	"listening on "*) read -r _ _ target _ _ page <<<"$line" ;;
	"ready: "*)
		printf '\nIn another terminal:\n'
		printf "  $1/vitwire %s --target ${target%,}\n" "encode PHOTO.jpg" "bench --seconds 5" "info"
		[ -z "$page" ] || echo "  metrics: http://$page/metrics"
		;;
	esac
done
