//! `kubectl mixquant`: reads the command line, writes the answer, ends with its exit code. Everything else is in `mixquant_operator::cli`.
#![forbid(unsafe_code)]

use std::io::{IsTerminal, stdout};
use std::process::ExitCode;

use clap::Parser;
use mixquant_operator::cli::answer::Format;
use mixquant_operator::cli::arguments::Arguments;
use mixquant_operator::cli::table::{Style, clean};
use mixquant_operator::cli::{Exit, run};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let asked_not = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let style = Style {
        colours: stdout().is_terminal()
            && !dumb
            && !asked_not
            && arguments.global.output == Format::Plain,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let ended = runtime
        .map_err(anyhow::Error::from)
        .and_then(|runtime| runtime.block_on(run::run(&arguments, style, &mut stdout())));
    match ended {
        Ok(exit) => ExitCode::from(exit as u8),
        Err(error) => {
            #[expect(
                clippy::print_stderr,
                reason = "the one place that tells a person why there is no answer"
            )]
            {
                eprintln!("error: {}", clean(&format!("{error:#}")));
            }
            ExitCode::from(Exit::Error as u8)
        }
    }
}
