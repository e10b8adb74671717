
function _cachectl_command
  set -l given (commandline -opc)
  set -l at (contains -i -- -- $given)
  complete -C (string join ' ' -- (string escape -- $given[(math $at + 1)..]) (commandline -ct))
end

function _cachectl_has_command
  set -l given (commandline -opc)
  contains -- "$given[2]" run trace bench stage; and contains -- -- $given
end

complete -c cachectl -n _cachectl_has_command -a '(_cachectl_command)'
