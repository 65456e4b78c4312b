//! Checks that comments and pages are at most 100 columns wide, and that links of pages lead to
//! files.
//!
//! The formatter breaks lines of code, but not of comments. Rows of tables, pictures between fences
//! and lines of a page with a link cannot be broken, so they may be wider.

use offshoot_machine::repository;

use crate::shell::Result;
use crate::sources;

/// The widest line, in columns.
const MOST: usize = 100;

/// The files and folders with sources and pages.
const PLACES: &[&str] =
    &["ARCHITECTURE.md", "CHANGELOG.md", "README.md", "bench", "crates", "docs", "fuzz", "xtask"];

/// Checks the comments of all sources, and all pages.
///
/// # Errors
/// The places of lines that are wider, and of links that lead to no file.
pub(crate) fn check() -> Result {
    let mut wrong = Vec::new();
    sources::each(PLACES, &["rs", "md"], |place, text| {
        let lines = if place.extension().is_some_and(|extension| extension == "rs") {
            wide_comments(text)
        } else {
            let folder = repository().join(place.parent().unwrap_or(place));
            wrong_lines(text, |link| folder.join(link).exists())
        };
        wrong.extend(lines.into_iter().map(|line| format!("{}:{line}", place.display())));
    })?;
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!("lines wider than {MOST} columns, and links to nothing:\n{}", wrong.join("\n")))
}

/// The numbers of the lines of a page that are too wide or link to a file that is not there.
fn wrong_lines(text: &str, is_there: impl Fn(&str) -> bool) -> Vec<usize> {
    let (mut wrong, mut is_picture) = (Vec::new(), false);
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            is_picture = !is_picture;
        }
        if is_picture {
            continue;
        }
        let links = line.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let leads = |link: &str| link.is_empty() || link.contains("://") || is_there(link);
        let is_free = line.starts_with('|') || line.contains("](");
        if !links.into_iter().all(leads) || !is_free && line.chars().count() > MOST {
            wrong.push(number);
        }
    }
    wrong
}

/// The numbers of the comment lines that are too wide.
fn wide_comments(text: &str) -> Vec<usize> {
    let (mut wide, mut is_picture) = (Vec::new(), false);
    for (number, line) in (1..).zip(text.lines()) {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_picture = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim_start();
        if comment.starts_with("```") {
            is_picture = !is_picture;
        }
        let is_free = is_picture || comment.starts_with('|');
        if !is_free && line.chars().count() > MOST {
            wide.push(number);
        }
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_comments_are_found_and_pictures_are_not() {
        let wide = "x".repeat(MOST);
        let text = format!(
            "//! {wide}\n//! | {wide} |\n//! ```text\n//! {wide}\n//! ```\n//! {wide}\nlet a = \
             \"{wide}\";\n    // {wide}\n/// {}\n",
            &wide[4..]
        );
        assert_eq!(wide_comments(&text), [1, 6, 8]);
    }

    #[test]
    fn wide_lines_of_pages_and_links_to_nothing_are_found() {
        let wide = "x".repeat(MOST + 1);
        let text = format!(
            "{wide}\n| {wide} |\n[here](a.md#part) {wide}\n[gone](b.md)\n[far](https://b)\n[up]\
             (#up)\n```\n{wide} [gone](b.md)\n```\n{wide}\n"
        );
        assert_eq!(wrong_lines(&text, |link| link == "a.md"), [1, 4, 10]);
    }
}
