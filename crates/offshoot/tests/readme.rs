//! The program in the README is that of the documents of the crate, which is compiled and run.

use std::fs;
use std::path::Path;

/// The first Rust program of a text in Markdown, without its hidden lines.
fn program(text: &str) -> String {
    let lines = text.lines().skip_while(|line| !matches!(*line, "```rust" | "```")).skip(1);
    let lines = lines.take_while(|line| *line != "```").filter(|line| !line.starts_with("# "));
    let lines: Vec<&str> = lines.filter(|line| !line.starts_with("#   ")).collect();
    lines.join("\n")
}

#[test]
fn the_readme_has_the_program_of_the_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("in crates/");
    let read = |path: &str| fs::read_to_string(root.join(path)).expect("the file is there");
    let source = read("crates/offshoot/src/lib.rs");
    let docs = source.lines().map_while(|line| line.strip_prefix("//!"));
    let docs: Vec<&str> = docs.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    let readme = read("README.md");
    let at = readme.find("```rust\n").expect("the README has a Rust program");
    let (ours, theirs) = (program(&docs.join("\n")), program(&readme[at..]));
    assert!(ours.contains("Volume::create") && ours.lines().count() <= 18, "{ours}");
    assert_eq!(theirs, ours);
}
