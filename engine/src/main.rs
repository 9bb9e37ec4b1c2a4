//! `mixquant-engine`: reads the command line, runs one command and turns its error into one line and an exit code.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mixquant_engine::{cli, telemetry};

/// Serves a language model with quantised prefill, precise decode and a mixed-precision KV cache.
#[derive(Parser)]
#[command(name = "mixquant-engine", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer OpenAI-compatible requests.
    Serve(cli::serve::Arguments),
    /// Measure attention, quantise the prefill copy, write the artifact and verify it.
    Calibrate(cli::calibrate::Arguments),
    /// Measure how far an artifact or a plan is from the unquantised model.
    Verify(cli::verify::Arguments),
    /// Measure what each scheme and quantiser costs on a model.
    Quality(cli::quality::Arguments),
    /// Write a quantised checkpoint in a layout that other engines load.
    Export(cli::export::Arguments),
    /// Bring a model from an object store or a web server into a folder; killed, it goes on where it was.
    Fetch(cli::fetch::Arguments),
    /// Say which plan fits a model and a device, and why.
    Advise(cli::advise::Arguments),
    /// Measure prefill and decode by scheme beside what this machine can do.
    Bench(cli::bench::Arguments),
    /// Say what a model's or an artifact's folder is.
    Inspect(cli::inspect::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    telemetry::init();
    let result = match arguments.command {
        Command::Serve(arguments) => cli::serve::run(&arguments),
        Command::Calibrate(arguments) => cli::calibrate::run(&arguments),
        Command::Verify(arguments) => cli::verify::run(&arguments),
        Command::Quality(arguments) => cli::quality::run(&arguments),
        Command::Export(arguments) => cli::export::run(&arguments),
        Command::Fetch(arguments) => cli::fetch::run(&arguments),
        Command::Advise(arguments) => cli::advise::run(&arguments),
        Command::Bench(arguments) => cli::bench::run(&arguments),
        Command::Inspect(arguments) => cli::inspect::run(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(
                clippy::print_stderr,
                reason = "the one place that tells a person why the program ends"
            )]
            {
                eprintln!("error: {error}");
            }
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(u8::MAX))
        }
    }
}
