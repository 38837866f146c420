//! The metrics of a run that goes on.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Seek as _, SeekFrom};

use super::Step;

/// Cuts the file behind its first `made` updates, so that none of those to come stands in it already, and returns them.
/// It is cut earlier where a line is not the next update's. What is written next goes behind them.
pub(super) fn cut(file: &mut File, made: u64) -> io::Result<Vec<Step>> {
    let (mut kept, mut end) = (Vec::new(), 0);
    let mut lines = BufReader::new(&mut *file);
    let mut line = Vec::new();
    for expected in 1..=made {
        line.clear();
        let bytes = lines.read_until(b'\n', &mut line)?;
        let step = serde_json::from_slice(&line).ok().filter(|step: &Step| step.step == expected);
        // A line without its end was still being written.
        let Some(step) = step.filter(|_| line.ends_with(b"\n")) else { break };
        kept.push(step);
        end += crate::runtime::units::from_index(bytes);
    }
    drop(lines);
    file.set_len(end)?;
    file.seek(SeekFrom::Start(end))?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};

    fn line(step: u64) -> String {
        let numbers = Step { step, loss: 0.1, ratio: Some([1.0, 1.0]), prompts: vec!["a".into()], ..Step::default() };
        serde_json::to_string(&numbers).unwrap() + "\n"
    }

    fn after_cut(text: &str, made: u64) -> (usize, String) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        let kept = cut(&mut file, made).unwrap().len();
        file.write_all(b"next").unwrap();
        file.rewind().unwrap();
        let mut left = String::new();
        file.read_to_string(&mut left).unwrap();
        (kept, left)
    }

    #[test]
    fn updates_that_come_again_are_cut_off_and_the_next_stands_behind_the_last() {
        let text: String = (1..=5).map(line).collect();
        assert_eq!(after_cut(&text, 3), (3, format!("{}{}{}next", line(1), line(2), line(3))));
        assert_eq!(after_cut(&text, 0), (0, "next".to_owned()));
    }

    #[test]
    fn a_torn_line_and_what_follows_it_do_not_stay() {
        let torn = format!("{}{}", line(1), line(2).trim_end());
        assert_eq!(after_cut(&torn, 2), (1, format!("{}next", line(1))));
        let twice = format!("{}{}{}", line(1), line(1), line(2));
        assert_eq!(after_cut(&twice, 2), (1, format!("{}next", line(1))));
    }
}
