# Completion of rlft's words in fish; made by `rlft completion fish`.
function __rlft_words
    PYTHON TAB fish (commandline --current-process --cut-at-cursor | string collect) 2>/dev/null
end
complete --command rlft --no-files --arguments '(__rlft_words)'
